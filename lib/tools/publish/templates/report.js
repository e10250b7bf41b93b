// What pages of the report do beyond reading: search, copy buttons, the mark in the contents.
"use strict";

// Search: sections that have every word, those with it in their heading first.
const search = document.querySelector("search");
const [field, list] = [search.querySelector("input"), search.querySelector("ol")];
const MOST = 12;
search.hidden = false;

function loadIndex() {
  if (window.SECTIONS || document.querySelector("script.index")) return;
  const script = Object.assign(document.createElement("script"), { className: "index" });
  script.src = search.dataset.up + "search.js";
  script.onload = showFound;
  document.head.append(script);
}

function find(words) {
  const found = [];
  for (const [path, page, at, heading, text] of window.SECTIONS || []) {
    const [title, body] = [`${page} ${heading}`.toLowerCase(), text.toLowerCase()];
    if (!words.every((word) => title.includes(word) || body.includes(word))) continue;
    const score = words.filter((word) => heading.toLowerCase().includes(word)).length
      - (path.startsWith("workbook/") ? 0.5 : 0);
    found.push({ path, page, at, heading, text, score, first: body.indexOf(words[0]) });
  }
  return found.sort((one, other) => other.score - one.score).slice(0, MOST);
}

function element(name, text, className = "") {
  return Object.assign(document.createElement(name), { textContent: text, className });
}

function showFound() {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length && window.SECTIONS ? find(words) : [];
  list.replaceChildren(
    ...found.map(({ path, page, at, heading, text, first }) => {
      const link = element("a", heading);
      link.href = search.dataset.up + path + (at && `#${encodeURIComponent(at)}`);
      const from = Math.max(0, first - 40);
      const item = element("li", "");
      item.append(link, element("span", ` ${page}`, "soft"));
      item.append(element("div", (from ? "… " : "") + text.slice(from, from + 140), "soft"));
      return item;
    }),
  );
  if (words.length && window.SECTIONS && !found.length) list.append(element("li", "nothing found"));
  list.hidden = !list.children.length;
}

field.addEventListener("focus", loadIndex);
field.addEventListener("input", showFound);
list.addEventListener("click", () => (list.hidden = true));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") list.hidden = true;
  if (event.key !== "/" || event.target.matches("input, textarea")) return;
  event.preventDefault();
  field.focus();
});

// A button that copies, on code that a reader may want: cells, and code in the text.
const code = navigator.clipboard ? ".jp-InputArea pre, .jp-RenderedMarkdown pre, main > .highlight pre" : "none";
for (const block of document.querySelectorAll(code)) {
  const button = Object.assign(element("button", "Copy", "copy"), { type: "button" });
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(block.textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  block.parentElement.classList.add("copied-from");
  block.after(button);
}

// A link into a fold opens it.
function openFold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", openFold);
if (location.hash) openFold();

// The contents mark the section that is being read: the last heading above the upper third, or at
// the end of the page the last one in view.
const column = document.querySelector("nav.contents");
const links = column ? [...column.querySelectorAll("a")] : [];
const headings = links.map((link) => document.getElementById(decodeURIComponent(link.hash.slice(1))));
function mark() {
  const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
  const read = headings.findLastIndex((heading) => {
    const { top, height } = heading.getBoundingClientRect();
    return height && top < innerHeight / (isAtEnd ? 1 : 3);
  });
  column.querySelector("[aria-current]")?.removeAttribute("aria-current");
  links[read]?.setAttribute("aria-current", "true");
  const link = links[Math.max(read, 0)];
  column.scrollTop = link.offsetTop - column.clientHeight / 2;
}
if (column) {
  let waiting = false;
  addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(() => (mark(), (waiting = false)));
    waiting = true;
  }, { passive: true });
  mark();
}

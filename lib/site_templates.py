"""What `lib.site` and `lib.site_index` make pages from: jinja2 templates and style sheets."""

# nbconvert's own page without the scripts that it would fetch (MathJax, RequireJS, Mermaid), with
# a dark theme beside the light one, a line on top that leads back to the index, and what pictures
# show in words: as their metadata say, or the text that stands for them.
PAGE_TEMPLATE = """
{%- extends "lab/index.html.j2" -%}
{%- macro download(output) -%}
{%- if output.metadata.download -%}<a class="download" download
 href="{{ output.metadata.download }}">{{ output.metadata.download[-3:] | upper }}</a>
{%- endif -%}
{%- endmacro -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
{%- block jupyter_widgets -%}{%- endblock -%}
{%- block html_head_css -%}
<style>@media (prefers-color-scheme: dark) {
{{ resources.include_css("static/theme-dark.css") | replace("<style type=\\"text/css\\">", "")
   | replace("</style>", "") }}
}
{{ page_css }}</style>
{%- endblock -%}
{%- block body_header -%}
<body class="jp-Notebook" data-jp-theme-light="true">
<nav class="report"><a href="index.html">All notebooks</a><span class="pages"></span>
<span>{{ page_note }}</span></nav>
{%- if page_error -%}<p class="report-error">
{%- if error_id -%}<a href="#{{ error_id }}">{{ page_error | e }}</a>
{%- else -%}{{ page_error | e }}{%- endif -%}</p>{%- endif -%}
<main>
{%- endblock -%}
{%- block data_png scoped -%}
{%- set text = output.data.get("text/plain", "") -%}
{%- set alt = (output | get_metadata("alt", "image/png")) or (text if text[:1] != "<" else "") -%}
{%- set image = super() -%}
{%- set image = image | replace("</div>", download(output) ~ "</div>") -%}
{{ image | replace("<img ", '<img alt="' ~ (alt | escape_html) ~ '" ', 1) if alt else image }}
{%- endblock -%}
{%- block data_markdown scoped -%}
{{ super() | replace("</div>", download(output) ~ "</div>") }}
{%- endblock -%}
{%- block data_latex -%}
<div class="jp-RenderedLatex jp-OutputArea-output">{{ output.data["text/latex"] | markdown2html }}
</div>
{%- endblock -%}
"""

PAGE_CSS = """
:root { color-scheme: light dark; }
body.jp-Notebook { max-width: 62rem; margin: 0 auto; padding: 0 1rem 4rem; }
nav.report { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: .8rem .2rem;
  justify-content: space-between; color: var(--jp-ui-font-color2);
  font: .85rem system-ui, sans-serif; }
.report-error a { color: inherit; }
nav.report .pages { display: flex; gap: 1.2rem; flex: 1; }
nav.report a, a.download { color: var(--jp-content-link-color); }
.report-error { margin: 0 0 1rem; padding: .6rem 1rem; border-left: 4px solid #d1242f;
  background: var(--jp-layout-color2); color: var(--jp-ui-font-color0);
  font: .9rem ui-monospace, monospace; overflow-wrap: anywhere; }
.report-widget { color: var(--jp-ui-font-color2); font-size: .9em; }
a.download { display: block; width: max-content; margin: .2rem 0 .5rem;
  font: .75rem system-ui, sans-serif; }
math { font: 1.08em "Latin Modern Math", "STIX Two Math", "Cambria Math",
  "DejaVu Math TeX Gyre", math; }
math[display=block] { overflow-x: auto; padding: .2em 0; }
.jp-OutputArea-output { overflow-x: auto; }
.jp-OutputArea-output pre { word-break: normal; overflow-wrap: anywhere; }
.jp-RenderedHTMLCommon pre, .jp-InputArea-editor pre { white-space: pre; overflow-wrap: normal;
  overflow-x: auto; }
.jp-OutputArea-output.jp-RenderedMarkdown pre { font-family: var(--jp-code-font-family); }
img { max-width: 100%; height: auto; }
"""

INDEX_TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Workbook report</title><style>
:root { color-scheme: light dark; --ink: #1c2128; --soft: #59636e; --line: #d8dee4; --page: #f6f8fa;
  --card: #fff; --link: #0b5fc0; --done: #1a7f37; --failed: #c9222d; --skipped: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --soft: #9aa5b1; --line: #343b44;
  --page: #0f1318; --card: #181d24; --link: #6cb0ff; --done: #4cc268; --failed: #ff7b72;
  --skipped: #e0b040; } }
body { margin: 0 auto; max-width: 50rem; padding: 2.5rem 1rem 4rem; background: var(--page);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.9rem; letter-spacing: -.01em; }
a { color: var(--link); text-decoration: none; } a:hover { text-decoration: underline; }
.soft { color: var(--soft); font-size: .9rem; }
ol { list-style: none; margin: 1.6rem 0; padding: 0; }
li { display: grid; grid-template-columns: 3rem 1fr auto; gap: .1rem .6rem; align-items: baseline;
  margin: .7rem 0; padding: .9rem 1.1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
li > .number { color: var(--soft); font-variant-numeric: tabular-nums; font-size: 1.2rem; }
li > .title { font-size: 1.15rem; font-weight: 600; }
li > .more { grid-column: 2 / 4; }
.figures { display: flex; flex-wrap: wrap; gap: .3rem 1.6rem; margin: .35rem 0 .15rem; padding: 0;
  border: 0; }
.figures div { display: flex; flex-direction: column-reverse; }
.figures dt { font-size: .8rem; }
.figures dd { font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; width: max-content; }
ul { margin: .4rem 0 0; padding-left: 1.2rem; columns: 2 18rem; column-gap: 2rem; }
ul li { display: list-item; margin: 0 0 .2rem; padding: 0; background: none; border: 0;
  break-inside: avoid; }
h2 { margin: 2rem 0 .4rem; font-size: 1.15rem; }
.status { font-size: .85rem; font-weight: 600; }
.done { color: var(--done); } .failed { color: var(--failed); } .skipped { color: var(--skipped); }
pre { margin: .4rem 0 0; padding: .6rem .8rem; border-left: 3px solid var(--failed);
  background: var(--page); overflow-x: auto; white-space: pre-wrap; font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem; margin: 0;
  padding-top: 1.2rem; border-top: 1px solid var(--line); font-size: .9rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
</style></head><body>
{% if up %}<a href="{{ up }}">← The newest run</a>{% endif %}
<h1>Workbook report</h1><div class="soft">{{ summary }}{% if up %} · an earlier run{% endif %}</div>
<ol>{% for page in pages %}
<li><span class="number">{{ page.number }}</span>
<span class="title"><a href="{{ page.href }}">{{ page.title }}</a></span>
<span class="status {{ page.status }}">{{ page.label }}</span>
<span class="more soft">{{ page.detail }} · <a href="{{ page.notebook }}">notebook</a></span>
{% if page.error %}<div class="more"><pre>{{ page.error }}</pre></div>{% endif %}
{% if page.figures %}<dl class="more figures">{% for name, value in page.figures %}
<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl>{% endif %}
{% if page.downloads %}<details class="more soft">
<summary>{{ page.downloads | length }} figures and tables to download</summary>
<ul>{% for file in page.downloads %}
<li><a href="{{ file.href }}" download>{{ file.kind }}</a> {{ file.title }}</li>{% endfor %}
</ul></details>{% endif %}</li>
{% endfor %}</ol>
<dl>{% for name, value in facts %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
{% if runs %}<h2>Earlier runs</h2><ul>{% for run in runs %}
<li><a href="{{ run.href }}">{{ run.date }}</a> <span class="soft">{{ run.summary }}</span></li>
{%- endfor %}</ul>{% endif %}
</body></html>
"""

"""Stories on a terminal: wrapped between words while they arrive, the prompt in bold."""

import shutil
import sys

BOLD, PLAIN = "\033[1m", "\033[0m"


class StoryPrinter:
    """Prints a story on the terminal, wrapped at its width.

    A word is held back until the white space after it shows that it is whole.

    Example:
        printer = StoryPrinter()
        printer.write("Once upon a", style=BOLD)
        printer.write(" time ")
        printer.close()
    """

    def __init__(self, width: int | None = None) -> None:
        self.width = width or shutil.get_terminal_size().columns
        self.column = 0
        self.spaces = self.word = ""
        self.word_length = 0

    def write(self, text: str, style: str = "") -> None:
        """Print `text`; `style` is an escape sequence that is switched on for it."""
        self.word += style
        for char in text:
            if not char.isspace():
                self.word += char
                self.word_length += 1
                continue
            self._end_word()
            self.spaces += char
            if char == "\n":
                self._print(self.spaces)
                self.column, self.spaces = 0, ""
        self.word += PLAIN if style else ""
        sys.stdout.flush()

    def close(self) -> None:
        """Print what was held back, and end the line."""
        self._end_word()
        self._print("\n")
        sys.stdout.flush()

    def _end_word(self) -> None:
        if self.word_length:
            length = len(self.spaces) + self.word_length
            if self.column and self.column + length > self.width:
                self.spaces, self.column, length = "\n", 0, self.word_length
            self._print(self.spaces)
            self.column += length
            self.spaces, self.word_length = "", 0
        self._print(self.word)
        self.word = ""

    def _print(self, text: str) -> None:
        sys.stdout.write(text)


def print_stories(prompts: tuple[str, ...], texts: list[str]) -> None:
    """Print each prompt with the text that continues it; as it is where there is no terminal."""
    if not sys.stdout.isatty():
        print("\n\n".join(prompt + text for prompt, text in zip(prompts, texts)))
        return
    for index, (prompt, text) in enumerate(zip(prompts, texts)):
        if index:
            print()
        printer = StoryPrinter()
        printer.write(prompt, style=BOLD)
        printer.write(text)
        printer.close()

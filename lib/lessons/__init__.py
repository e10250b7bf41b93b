"""Functions that notebooks call: exercises, explorers, figures; a folder for each notebook."""

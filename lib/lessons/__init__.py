"""What notebooks call: exercises, explorers and figures, in a folder for each notebook."""

"""From raw text to a language model trained on several GPUs, a room for each topic.

README.md beside this file says what to read for each lesson.

Importing this package has no side effects: it loads no torch, opens no device and reads no file.
"""

__version__ = "0.1.0"

"""From raw text to a language model trained on several GPUs, one readable file per topic.

Importing this package has no side effects: it loads no torch, opens no device and reads no file.
"""

__version__ = "0.1.0"

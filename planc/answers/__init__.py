"""The answers of planc, each written once: the Python API and the commands call them."""

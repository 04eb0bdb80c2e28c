"""`python -m planc` is the command `planc`."""

from planc.cli import command

if __name__ == "__main__":
    command()

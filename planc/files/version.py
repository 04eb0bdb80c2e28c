"""The version of planc."""

VERSION = "0.1.0"

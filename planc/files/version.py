"""The version of planc."""

VERSION = "0.2.0"

"""A plan on a cluster: the file that starts it (`planc launch`), and what is checked on its nodes
before it trains (`planc preflight`). Nothing here starts a process.
"""

"""The numeric proof of a plan, on a small model: simulated (flow), on processes (verify).

`planc check` needs `flow` alone, so nothing is imported here.
"""

"""The numeric proof of a plan on a small model: simulated (flow) or on processes (verify).

`planc check` needs only `flow`, so nothing is imported here.
"""

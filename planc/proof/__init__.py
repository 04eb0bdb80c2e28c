"""The numeric proof of a plan on a proxy model: simulated (flow) or on processes (verify).

`planc check` needs only `flow`, so nothing is imported here.
"""

"""Two lowered plans -> what changes. (Not `diff`, the function `planc.diff`.)"""

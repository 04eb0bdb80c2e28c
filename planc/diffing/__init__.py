"""Two lowered plans -> what changes. (Not `diff`, which is the function `planc.diff`.)"""

"""Memory and time of a training step, from a description of its work, a hardware profile and a
stack profile.

`workload` says what one rank computes, keeps and sends; `memory` and `step_time` say what that
costs. Nothing here imports torch but `kept_tensors`, which counts what autograd keeps.
"""

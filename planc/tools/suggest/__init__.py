"""The fastest plan for a model on some ranks, profiles fitted to what a machine measured, and ranks
that are run beside an estimate.
"""

"""Passes from plan to plan, which add what follows from its lines. Import no torch."""

"""Loads, saves, resumes and exports weights."""

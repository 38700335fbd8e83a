"""Runs with real faults, and what they must leave as it would be without them."""

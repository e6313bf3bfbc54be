"""Measures what groups cost, plans, checks the plan and reports on it."""

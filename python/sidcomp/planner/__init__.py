"""Fusion plans, and what they are made from: cost curves, profiles, searches. Needs no torch."""

"""Runs the steps of one model: takes buckets, and returns averaged gradients."""

"""Recipes for disaggregated serving, from a YAML file to one verdict."""

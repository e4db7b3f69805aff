"""Quadrature rules."""

"""Mixture of experts: routing, sorting and the experts themselves."""

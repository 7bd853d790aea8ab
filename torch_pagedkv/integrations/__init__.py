"""Paged attention in other people's code. Import the module you want; each needs its library."""

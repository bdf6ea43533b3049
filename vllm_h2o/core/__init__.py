"""Counting: blocks per request, decided by the scheduler from token counts alone."""

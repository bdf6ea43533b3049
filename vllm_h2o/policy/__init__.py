"""What to keep: numbers and torch only, no vLLM.

`config` holds what a user asks for, `layout` turns it into slots, `methods` score
tokens and `selection` decides which prompt tokens survive the transition.
"""

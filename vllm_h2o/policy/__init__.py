"""What to keep: numbers and torch only, no vLLM.

`config` holds what a user asks for, `layout` turns it into slots, `scores` and
`selection` decide which prompt tokens survive the transition.
"""

"""The one rule for tensors at rest: whatever is computed of rows is what the whole would give.

`root.py` says what is at rest, `rule.py` what an operator on it does, `views.py` what of it can be seen without being whole;
`known` has what ranks know of values.
"""

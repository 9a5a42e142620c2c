"""Deep OptEq: several layers in one fixed-point equation, and feed-forward networks written as one."""

"""What a forward pass calls, seen while it runs: a function mode, the attention calls it intercepts, their masks and layouts."""

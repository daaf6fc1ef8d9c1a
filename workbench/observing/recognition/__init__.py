"""What a foreign decoder is made of, found in one traced run on example tokens: blocks, attention, projections, value paths."""

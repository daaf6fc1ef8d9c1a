"""Recognition of a foreign decoder in one traced run on example tokens: blocks, attention, projections, value paths."""

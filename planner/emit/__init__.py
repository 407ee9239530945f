"""Room of planner; see its modules."""

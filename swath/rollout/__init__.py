"""The engine: loop, lanes, slots, trajectory ids, stats and the frame budget. It knows no process."""

"""Studies of a trace: compare, calibrate, audit, fidelity."""

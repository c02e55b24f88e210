"""Questions put to a trace: compare, calibrate, audit, fidelity."""

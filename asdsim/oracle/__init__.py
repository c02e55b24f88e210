"""A second implementation of the walk and the rules, in slow plain Python that shares no code with what it checks."""

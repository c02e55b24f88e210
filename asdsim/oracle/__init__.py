"""The walk and the rules once more, in slow plain Python that shares no code with what it checks."""

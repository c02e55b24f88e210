"""Strict matching of shorter draft blocks: what K would have been best."""

from .spec import NEVER, Parameter, Rule

RULE = Rule(
    name="truncate",
    title="strict token matching of the first K draft tokens",
    source="draft length as in any speculative decoder (no setting is published; 4 is ours)",
    accepts="never; blocks are cut to K tokens",
    parameters=(Parameter("K", 4.0, "draft tokens verified per step", low=1.0, whole=True),),
    score=lambda seen, params: NEVER,
    limit=lambda params: 0.0,
    note="holds for drafters that draft token by token; each K is laid out anew, and ends at other prefixes than K+1",
)

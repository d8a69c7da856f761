"A failed turn with its trace around it, as those who write hints are asked about it."
from composer_replication.core.trace import ErrorSite, HintContext, ToolCall, Trace, Turn

TURNS = (
    Turn("system", "You are an agent."),
    Turn("user", "Book a seat for Mia."),
    Turn("assistant", thinking="SECRET THOUGHT", tool_calls=(ToolCall("user_details", {"user_id": "mia"}, "call_17"),)),
    Turn("tool", "Error: User mia not found", observation=True, failed=True),
    Turn("assistant", "FUTURE question"),
    Turn("user", "FUTURE answer"),
)


def meta(turns=TURNS, gold="GOLDEN flight HAT417", error=TURNS[3].content, **fields):
    trace = Trace("t", turns, gold=gold, **fields)
    known = HintContext("runtime_error", error, (), "user_details")
    return HintContext.at(trace, ErrorSite("t", 2, 3, 2, 3, "runtime_error", known))

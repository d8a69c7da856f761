"""The gate: each clause can fail alone; its gradient against finite differences; its actions against the environment."""
import pytest
import torch
from hint_gate import BOUND, CONTROLS, FailedTurn, GateRow, gate, gate_problems, sdpo_gradient, shared_turns, works

from composer_replication.core.errors import InputProblem
from composer_replication.core.trace import ToolCall, Trace, Turn
from composer_replication.envs.toy.env import world_rows
from composer_replication.envs.toy.model import build_model, embedded_model, embedded_tokenizer
from composer_replication.envs.toy.teams import TEAMS, TeamEnv, shuffled, team_fact, team_of
from composer_replication.experiments.statistics import Interval
from composer_replication.rollout.tool_call_parser import ParsedTurn


def rows(none=0.17, exact=0.6, cosine=0.49, **controls):
    flat = lambda x: Interval(x, x, x, 1, 8)
    return [GateRow("none", flat(none), None, None), GateRow("exact", flat(exact), 1.0, 1.0),
            *(GateRow(name, flat(controls.get(name, none)), cosine, 0.1) for name in CONTROLS)]


def test_an_agent_at_the_bounds_passes():
    assert gate_problems(rows(none=0.25, **dict.fromkeys(CONTROLS, 0.3))) == []


@pytest.mark.parametrize("missed, said", [({"exact": 0.59}, "exact hints lead to 59 %"), ({"cosine": 0.5}, "cosine 0.50"),
                                          *(({name: 0.23}, f"{name} hints lead to 6 points more") for name in BOUND)])
def test_each_clause_fails_alone(missed, said):
    problem, = gate_problems(rows(**missed))
    assert said in problem


def test_a_control_that_holds_the_answer_bounds_nothing():
    fact = team_fact("core/red_port.py", 3)
    assert {'"core/red_port.py",', "3."} <= set(shuffled(fact).split())  # so copying the number is right
    assert set(CONTROLS) - set(BOUND) == {"shuffled"} and gate_problems(rows(shuffled=0.9)) == []


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_gradient_is_that_of_the_distance(beta):
    model = build_model(40, 3).double()
    turns = [FailedTurn(0, None, 0, (1, 2, 3), (1, 2, 9, 9, 3), (4, 5)), FailedTurn(1, None, 0, (7,), (8, 7), (6,))]

    def log_probs(context, ids):
        with torch.no_grad():
            return model(torch.tensor([[*context, *ids]])).logits[0, len(context) - 1:-1].log_softmax(-1)

    teachers = [log_probs(t.hinted, t.ids) for t in turns]  # stay as they are

    def distance():
        total = 0.0
        for t, teacher in zip(turns, teachers):
            p, q = (teacher, log_probs(t.plain, t.ids))[::1 if beta == 0 else -1]
            total += (p.exp() * (p - q)).sum(-1).mean().item() / len(turns)
        return total

    gradient, places = sdpo_gradient(model, turns, beta), list(model.parameters())
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start, values = torch.nn.utils.parameters_to_vector(places).detach(), []
    for step in (1e-5, -1e-5):
        torch.nn.utils.vector_to_parameters(start + step * direction, places)
        values.append(distance())
    assert (values[0] - values[1]) / 2e-5 == pytest.approx((gradient @ direction).item(), rel=2e-3)


def test_an_action_is_tried_in_the_state_before_the_turn():
    env = TeamEnv()
    env.reset("4", "dev")
    tool = next(t for t in env.task.tools if t.role == "write")
    path, text = (tool.arguments[name] for name in ("path", "text"))
    call = lambda team: ToolCall(tool.name, {path: env.task.path, "team": team, text: "x"}, "c")
    trace = Trace("t", (Turn("user", env.task.prompt), Turn("assistant", "", None, (call(0),))), env.tools, "dev-4")
    action = lambda *calls: ParsedTurn("", "", calls)
    right = [team for team in TEAMS if works(trace, 1, action(call(team)), TeamEnv)]
    assert right == [team_of(env.task.path)] and not works(trace, 1, action(), TeamEnv)


def test_only_turns_with_a_hint_of_every_kind_are_measured():
    turn = lambda problem, at, mark: FailedTurn(problem, None, at, (), (mark,), ())
    given = {"exact": [turn(0, 1, 1), turn(0, 3, 1), turn(2, 1, 1)], "wrong": [turn(0, 3, 2), turn(1, 1, 2), turn(2, 1, 2)]}
    shared = shared_turns(given)
    assert {q: [(t.problem, t.turn) for t in turns] for q, turns in shared.items()} == dict.fromkeys(given, [(0, 3), (2, 1)])
    assert [t.hinted for t in shared["wrong"]] == [(2,), (2,)]
    with pytest.raises(InputProblem, match="no error turn with a hint; take more rows"):
        shared_turns(given | {"other": []})


def test_every_kind_of_hint_is_measured_at_the_turns_of_all():
    silent, model, tokenizer = lambda quality: lambda kind, context: None, embedded_model("teams"), embedded_tokenizer()
    with pytest.raises(InputProblem, match="take more rows"):
        gate(model, tokenizer, world_rows(1, "test-gate", "dev"), TeamEnv, silent, turns=1)
    mute = lambda quality: lambda kind, context: "Look." if quality != "other" or context.site.turn > 2 else None
    by = {row.hints: row for row in gate(model, tokenizer, world_rows(4, "test-gate", "dev"), TeamEnv, mute, gradients=1)}
    assert by["exact"].cosine == pytest.approx(by["other"].cosine) and by["exact"].right == by["other"].right == by["wrong"].right

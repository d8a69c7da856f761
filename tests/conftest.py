"""What several tests share: the data, the site, the tiers, and how tests are dealt to processes."""
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from hypothesis import HealthCheck, settings
from pages import LIMIT

from composer_replication.core.known_warnings import ignore_known_warnings
from composer_replication.sandbox.bubblewrap import bubblewrap_problem

ROOT = Path(__file__).parents[1]
# A busy machine makes every example slow: time is no property of what these tests try.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Tests play scripted agents of ours, on a bare machine too.
if bubblewrap_problem():
    os.environ.setdefault("COMPOSER_SANDBOX", "local-unsafe")

# A shell that runs the tests in the background has Ctrl-C ignored, and every process that they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


SHARED = ROOT.parent / "shared"  # what no user has


@pytest.fixture(scope="session")
def shared_data() -> Path:
    "The folder of real traces, tasks and tokenizers; skips where it is absent."
    path = Path(os.environ.get("COMPOSER_DATA", SHARED / "data"))
    if not path.is_dir():
        pytest.skip("the shared data is not here: set COMPOSER_DATA to its folder")
    return path


@pytest.fixture(scope="session")
def tokenizers(shared_data) -> Path:
    "The folder of real tokenizers; skips where it is absent."
    return shared_data / "tokenizers"


# A test that needs what a bare machine lacks says so, or it fails everywhere: on a bare machine alone nobody would see it.

BROWSERS = {"chromium", "chromium-browser", "google-chrome"}  # programs of sandboxes may be asked for; CI runs all without them
OPENED = {"open", "os.listdir", "os.scandir"}


class Bounds:
    "What the running test took without its mark; an audit hook writes it down."

    marks: frozenset[str] | None = None  # of the running test
    crossed: list[str] = []

    @classmethod
    def look(cls, event: str, given: tuple) -> None:
        if cls.marks is None or event not in OPENED and event != "subprocess.Popen":
            return
        what = given[0]
        if event != "subprocess.Popen":
            if isinstance(what, str | os.PathLike) and "data" not in cls.marks:
                path = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(what)))
                if path.startswith(f"{SHARED}{os.sep}"):
                    cls.crossed.append(f"opens {path}, which no user has: take the fixture shared_data")
        elif os.path.basename(os.fsdecode(what)) in BROWSERS and "browser" not in cls.marks:
            cls.crossed.append(f"runs {os.fsdecode(what)}, which a bare machine lacks: mark it browser, and skip without it")


sys.addaudithook(lambda event, given: Bounds.look(event, given))


@pytest.hookimpl(wrapper=True)
def within_bounds(item):
    Bounds.marks, Bounds.crossed = frozenset(mark.name for mark in item.iter_markers()), []
    try:
        returned = yield
    finally:
        Bounds.marks = None
    if Bounds.crossed:
        pytest.fail(f"the test {Bounds.crossed[0]}", pytrace=False)
    return returned


pytest_runtest_setup = pytest_runtest_call = within_bounds


@pytest.fixture(scope="module", autouse=True)
def no_judge_waits_longer() -> Iterator[None]:
    "Judges wait for the next caller in this process; other modules count processes, files and folders."
    yield
    if runner := sys.modules.get("composer_replication.envs.deletion.judge.runner"):
        runner.close_judges()


# A browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HERE = ("file:", "data:", "blob:", "about:", "http://127.0.0.1", "ws://127.0.0.1")


@pytest.fixture(scope="module")
def browser():
    "A headless Chromium; where there is none its tests are skipped before they wait for anything else."
    from playwright.sync_api import sync_playwright
    with sync_playwright() as play:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]  # it runs as root, in containers too
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=options)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    "Opens pages; what the browser complains of is in `page.complaints`."
    contexts = []

    def opened(url, mode="light", **more):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=mode, reduced_motion="reduce", **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LIMIT)
        page.complaints = []
        page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        # A page that is left gives up what it still waits for, its icon say: no fault of the site.
        page.on("requestfailed", lambda request: request.failure == "net::ERR_ABORTED"
                or page.complaints.append(f"failed: {request.url}: {request.failure}"))
        page.on("request", lambda asked: asked.url.startswith(HERE) or page.complaints.append(f"from elsewhere: {asked.url}"))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()


# An object store

@pytest.fixture(scope="module")
def bucket():
    "An S3 bucket of moto's; skips where moto or s3fs is not installed."
    moto = pytest.importorskip("moto.server", reason="moto is not installed: make test-islands")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: make test-islands")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    before = dict(os.environ)
    os.environ.update({f"AWS_{name}": "test" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")}, AWS_DEFAULT_REGION="us-east-1",
                      AWS_ENDPOINT_URL="http://{}:{}".format(*server.get_host_and_port()))
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    yield "s3://bucket"
    os.environ.clear()
    os.environ.update(before)
    server.stop()


# Tiers. A mark is set where a test, its fixtures, or a function of tests/ that they call has such a fixture or uses such a name.

FIXTURES = {"data": {"shared_data"}, "site": {"site"}, "browser": {"browser", "lab"}, "process": {"notebooks"}}
NAMES = {
    "process": {"subprocess", "Popen", "multiprocessing", "pty", "SERVER", "start_new_kernel"},
    "sandbox": {"open_sandbox", "prepare_subject", "FeatureDeletionEnv", "sweep", "sandbox_problem", "make_tasks"},
    "trainer": {
        "ComposerReplicationTrainer", "GRPOTrainer", "SFTTrainer", "run_recipe", "trainer_script",
        "arm_script"}}
LONG = {  # seconds each: `make check` leaves them out, of a test with many cases all but the first
    "recipes/test_record.py": {"test_episodes_are_reused_only_for_the_tasks_and_settings_they_were_played_from"},
    "cli/test_console.py": {"test_a_folder_an_empty_file_and_no_json_are_one_sentence"},
    "project/test_tools.py": {"test_a_page_that_shows_something_else_than_it_gives_is_found"},
    "training/test_recorded.py": {"test_losses_and_gradients_are_those_of_whole_traces"},
    "tree/test_forward.py": {"test_a_long_branch_over_a_long_trunk_makes_no_mask_of_both"},
    "tree/test_build.py": {
        "test_a_turn_of_200_000_tokens_takes_bounded_time", "test_real_traces_align", "test_alignment_is_exact_or_refused"},
    "tree/test_controls.py": {"test_context_holds_no_more_control_tokens_than_for_a_harmless_text"},
    "tree/test_fenced.py": {"test_what_a_family_renders_is_read_back"},
    "tree/test_template.py": {"test_verdict_on_every_real_template"},
    "rollout/test_continuous.py": {
        "test_the_order_in_which_tools_answer_and_rewards_end_changes_nothing",
        "test_a_row_says_the_same_whoever_decodes_beside_it",
        "test_neither_places_nor_the_order_of_rows_change_an_episode", "test_no_row_waits_for_another",
        "test_deterministic_episodes_are_equal_bit_for_bit_whenever_tools_answer", "test_a_hanging_tool_ends_its_own_row_only",
        "test_a_reward_that_fails_or_hangs_ends_its_own_row_only"},
    "project/test_docs.py": {
        "test_a_patched_method_belongs_to_its_class", "test_a_page_that_moved_stands_in_no_sidebar_of_an_older_build"},
    "../spikes/200-gpu/test_programme.py": {
        "test_tests_that_do_not_end_are_killed_with_their_children_and_the_stage_says_so"},
    "envs/test_sql.py": {
        "test_what_was_seen_of_recorded_tasks_stays", "test_no_near_miss_is_paid_and_every_paraphrase_is",
        "test_no_question_holds_a_name_of_its_database", "test_the_reference_gives_what_plain_python_gives",
        "test_order_counts_only_where_it_is_asked_for"},
    "envs/test_judge_messages.py": {
        "test_10_000_fuzzed_results_neither_raise_nor_hang_nor_grow", "test_mutated_submissions_never_raise_nor_hang"},
    "envs/test_monitor.py": {"test_the_scan_reads_the_standard_library"},
    "envs/test_toy_model.py": {"test_training_again_gives_the_same_weights"},
    "envs/test_bounds.py": {"test_a_source_that_takes_too_much_is_no_answer_and_the_next_one_is"},
    "envs/test_interpreter.py": {"test_hostile_text_takes_little_time"},
    "envs/test_make_tasks.py": {"test_only_the_body_changes"},
    "traces/test_labels.py": {
        "test_only_the_listed_disagreements", "test_everything_shared_is_read_fast",
        "test_a_row_of_each_shared_file_survives_our_own_format"},
    "traces/test_export.py": {"test_trl_renders_the_columns", "test_arguments_stay_apart_through_disk"},
    "traces/test_read.py": {"test_memory_does_not_grow_with_the_file"},
    "traces/test_one_list.py": {"test_a_long_list_needs_the_memory_of_one_trace"},
    "traces/test_siblings.py": {
        "test_intercode_siblings_and_pairs", "test_shared_states_of_real_traces_are_those_of_a_naive_comparison"},
    "traces/test_error_sites.py": {"test_a_huge_turn_is_judged_quickly"},
    "recipes/test_memory_estimate.py": {
        "test_a_plan_for_fewer_devices_needs_more_of_each",
        "test_the_plan_says_how_branches_are_read",
        "test_vllm_in_this_process_needs_its_weights_and_a_cache_instead_of_one_for_sampling",
        "test_keys_and_values_lie_beside_the_activations_where_branches_read_them"},
    "recipes/test_recipe.py": {"test_every_shipped_recipe_has_a_plan_without_weights"},
    "recipes/test_models.py": {"test_our_templates_carry_all_and_their_turns_are_read_back"},
    "recipes/test_warm_up.py": {"test_only_what_the_assistant_wrote_is_trained_on"},
    "rollout/test_teachers_server.py": {"test_lab_agents_answer_over_http_as_they_do_in_process"},
    "replay/test_recovery.py": {"test_recorded_sql_sessions_hold_a_pair_at_every_tenth_failure"},
    "replay/test_gates.py": {"test_gates_on_lab_traces_with_lab_actions"},
    "../spikes/003-pairs-from-disagreement/test_recorded.py": {"test_real_states_are_those_of_whole_histories"},
    "replay/test_clean.py": {"test_real_templates", "test_one_step_of_trl_labels_exactly_the_actions"},
    "rollout/test_compaction.py": {"test_the_summary_of_a_database_is_what_the_query_comes_from"},
    "rollout/test_record.py": {"test_an_agent_over_http_is_recorded_as_our_loop_records", "test_openais_client"},
    "rollout/test_loop.py": {"test_trees_of_real_templates_are_exact"}}
FILES = {"sandbox": ("tests/sandbox/",), "trainer": ("tests/training/test_trainer_",)}


def names_in(code: CodeType) -> Iterator[str]:
    "The names that code uses, also in functions within it."
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


@cache
def names_of(function: FunctionType) -> tuple[frozenset[str], tuple[FunctionType, ...]]:
    "Names that a function uses, those of a class's bases among them, and functions and methods; none of one outside of tests/."
    if not function.__code__.co_filename.startswith(f"{ROOT}/tests/"):
        return frozenset(), ()
    names, called = set(names_in(function.__code__)), []
    for thing in [function.__globals__.get(name) for name in names]:
        if isinstance(thing, type):
            names |= {base.__name__ for base in thing.__mro__}
            called += vars(thing).values()
        called.append(thing)
    return frozenset(names), tuple(f for f in called if isinstance(f, FunctionType))


@cache  # once for all cases of a test
def names_used(*functions) -> set[str]:
    "The names that these functions use, also through functions of tests/."
    used, waiting, done = set(), [f for f in functions if isinstance(f, FunctionType)], set()
    while waiting:
        function = waiting.pop()
        if function not in done:
            done.add(function)
            names, called = names_of(function)
            used |= names
            waiting += called
    return used


def tiers(item) -> set[str]:
    "The marks that a test gets by itself."
    fixtures = getattr(item, "fixturenames", ())
    definitions = [d.func for named in item._fixtureinfo.name2fixturedefs.values() for d in named]
    used, path = names_used(item.function, *definitions), item.path.relative_to(ROOT).as_posix()
    return {mark for mark, names in FIXTURES.items() if names & set(fixtures)} \
        | {mark for mark, names in NAMES.items() if names & used} \
        | {mark for mark, starts in FILES.items() if path.startswith(starts)}


# Files of tests' names, a line each: TESTS_SKIPPED_TO takes those that skip, and TESTS_ONLY leaves no others. CI tries each once.
SKIPPED_TO, ONLY = os.environ.get("TESTS_SKIPPED_TO"), os.environ.get("TESTS_ONLY")


def pytest_runtest_logreport(report):
    if SKIPPED_TO and report.skipped and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(SKIPPED_TO, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    if ONLY:
        wanted = set(Path(ONLY).read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]
    cases = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in LONG.get(os.path.relpath(item.path, ROOT / "tests"), ()):
            cases[item.path, name] += 1
            if cases[item.path, name] > 1 or not hasattr(item, "callspec"):
                item.add_marker(pytest.mark.long)
        for mark in tiers(item):
            item.add_marker(mark)
        if CHROMIUM is None and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason="there is no browser here: apt-get install -y chromium"))
    slowest = ("trainer", "sandbox", "process", "browser")
    heavy = Counter(item.path for item in items for mark in slowest if item.get_closest_marker(mark))
    late = {item.path for item in items if BESIDE.keys() & set(item.fixturenames)}
    # Long files first, so that no process waits at the end; those that need what runs beside the tests last.
    items.sort(key=lambda item: (item.path in late, -heavy[item.path]))


# What takes minutes runs beside the tests, and a fixture waits for it. The process that the user started makes a folder, one
# worker starts what any test needs, and any may wait for it.

SITE, FOLDER = ROOT / "docs" / "_build" / "html", pytest.StashKey()
BESIDE = {  # fixture: what must have run
    "site": [str(ROOT / "docs" / "build.py"), "--out", str(SITE), "--without-sources"],
    "notebooks": [str(ROOT / "tools" / "check.py"), "notebooks"]}


def pytest_configure(config):
    ignore_known_warnings()
    given = getattr(config, "workerinput", {}).get("beside")  # in a worker of pytest-xdist
    config.stash[FOLDER] = Path(given or tempfile.mkdtemp(prefix="beside-"))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["beside"] = str(node.config.stash[FOLDER])


def start_beside(command: list[str], folder: Path, owner: int) -> int:
    """Start a command as an orphan, since tests that look at children of this process must not find it; return its group.

    Its output and exit status are kept in `folder`. It ends with the process `owner`, also where that is killed."""
    script = ('owner=$1; shift; ("$@" > log 2>&1; echo $? > code.new; mv code.new code) & '
              '(while kill -0 "$owner"; do sleep 1; done; kill 0) &')
    nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    started = subprocess.Popen(["sh", "-c", script, "sh", str(owner), *command], cwd=folder, start_new_session=True, **nowhere)
    started.wait(60)
    return started.pid


def pytest_collection_finish(session):
    gc.freeze()  # what was imported stays: half a million objects, which every trainer that starts would look through
    worker = getattr(session.config, "workerinput", None)
    needed = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    first = (worker or {"workerid": "gw0"})["workerid"] == "gw0" and not session.config.option.collectonly
    for name in BESIDE.keys() & needed if first else ():
        folder = session.config.stash[FOLDER] / name
        folder.mkdir()
        group = start_beside([sys.executable, *BESIDE[name]], folder, os.getppid() if worker else os.getpid())
        (folder / "group").write_text(str(group))


def pytest_unconfigure(config):
    if hasattr(config, "workerinput") or FOLDER not in config.stash:
        return
    for group in config.stash[FOLDER].glob("*/group"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(group.read_text()), signal.SIGTERM)
    shutil.rmtree(config.stash[FOLDER], ignore_errors=True)


def ended_well(folder: Path) -> None:
    "Wait for what runs beside the tests; its last words where it failed."
    end = time.monotonic() + 3600
    while not (folder / "code").exists():
        assert time.monotonic() < end, f"no end in an hour: {folder.name}"
        time.sleep(0.2)
    assert (folder / "code").read_text().strip() == "0", (folder / "log").read_text()[-4000:]


@pytest.fixture(scope="session")
def site(request) -> Path:
    "The site, built once for all tests."
    ended_well(request.config.stash[FOLDER] / "site")
    return SITE


@pytest.fixture(scope="session")
def notebooks(request) -> None:
    "Every notebook has run."
    ended_well(request.config.stash[FOLDER] / "notebooks")

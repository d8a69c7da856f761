"""What a figure rests on: the code that makes a run's reward, in one number."""
from hashlib import sha256
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parents[1] / "composer_replication" / "envs"


def reward_fingerprint(
    environment: str,  # a folder of `composer_replication/envs`: "sql", "toy"
) -> str:  # hexadecimal
    "Hash the environment's modules: judge, tasks, prompts and hints. Another number: another reward, not to be compared."
    digest = sha256()
    for path in sorted((ENVIRONMENTS / environment).glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()

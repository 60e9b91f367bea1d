"""Whether answers and log-probabilities are those of another run of the model."""

from dataclasses import dataclass, field

# Difference of log-probabilities that a dtype may account for, as in the conformance kit: a token
# within it of the likeliest one is a tie that either side may break.
GAPS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# Of the mean over all tokens of fixed texts.
MEANS = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.08}


@dataclass(slots=True)
class Agreement:
    """What was found while answers of one dtype were compared.

    ``worst`` is the largest difference of log-probabilities, ``total`` their sum over ``count``;
    ``widest`` the largest lead of a token that another one was taken for.
    """

    dtype: str
    failures: list[str] = field(default_factory=list)
    ties: int = 0
    widest: float = 0.0
    worst: float = 0.0
    total: float = 0.0
    count: int = 0

    def answer(self, label, got, want):
        """Compare two greedy answers token by token, up to the first difference, which must be a
        tie. Each is (token ids, tables: token id -> log-probability); ``got`` may have no tables,
        ``want``'s have the likeliest tokens."""
        (ids, tables), (wanted, truths) = got, want
        if len(ids) != len(wanted):
            self.failures.append(f"{label}: {len(ids)} tokens instead of {len(wanted)}")
        for place, (token, right) in enumerate(zip(ids, wanted, strict=False)):
            if tables:
                self.table(f"{label}, token {place}", tables[place], truths[place])
            if token == right:
                continue
            lead = truths[place][right] - truths[place].get(token, float("-inf"))
            if lead > GAPS[self.dtype]:
                self.failures.append(
                    f"{label}: token {place} is {token} instead of {right}, which is {lead:.3g} "
                    "likelier in log-probability"
                )
            else:
                self.ties, self.widest = self.ties + 1, max(self.widest, lead)
            return

    def table(self, label, got, want):
        """Compare the log-probabilities of the tokens that both tables have."""
        for token in got.keys() & want.keys():
            error = abs(got[token] - want[token])
            self.total, self.count = self.total + error, self.count + 1
            if not error <= GAPS[self.dtype]:
                self.failures.append(
                    f"{label}: the log-probability of {token} is {got[token]:.5g} instead of "
                    f"{want[token]:.5g}"
                )
            self.worst = max(self.worst, error)

    @property
    def mean(self):
        return self.total / self.count if self.count else 0.0

    def fields(self):
        """Of a row."""
        failures = list(self.failures)
        if self.mean > MEANS[self.dtype]:
            failures.append(f"log-probabilities are off by {self.mean:.3g} in the mean")
        return {
            "unit": "faults",
            "figure": len(failures),
            "ties": self.ties,
            "widest_tie": round(self.widest, 6),
            "worst_logprob": round(self.worst, 6),
            "mean_logprob": round(self.mean, 7),
            "compared": self.count,
            "failures": failures[:5],
        }


def plain(table):
    """A table of an output as token id -> log-probability."""
    return {token: entry.logprob for token, entry in table.items()}


def answer_of(output):
    """(token ids, tables) of the first answer of a request."""
    first = output.outputs[0]
    return first.token_ids, [plain(table) for table in first.logprobs or ()]

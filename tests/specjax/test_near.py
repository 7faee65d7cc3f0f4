"""Guesses at names that are none."""

from specjax import near


def test_the_nearest_name_is_guessed_as_it_is_written_there():
  assert near.guess("ngrams", ["model", "ngram"]) == (
    " (did you mean 'ngram'?)"
  )
  assert near.guess("quite", {"quit": 1, "rule": 2}, write="/{}") == (
    " (did you mean /quit?)"
  )


def test_nothing_is_guessed_of_what_is_like_no_name():
  assert not near.guess("zzz", ["model", "ngram"])
  assert not near.guess("tempo", ["temperature"], cutoff=0.9)

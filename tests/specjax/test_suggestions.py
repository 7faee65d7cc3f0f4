"""Guesses at names that are none."""

from specjax import suggestions


def test_the_nearest_name_is_guessed_as_it_is_written_there():
  assert suggestions.guess("ngrams", ["model", "ngram"]) == (
    " (did you mean 'ngram'?)"
  )
  assert suggestions.guess("quite", {"quit": 1, "rule": 2}, write="/{}") == (
    " (did you mean /quit?)"
  )


def test_nothing_is_guessed_of_what_is_like_no_name():
  assert not suggestions.guess("zzz", ["model", "ngram"])
  assert not suggestions.guess("tempo", ["temperature"], cutoff=0.9)

"""Evaluation on questions or prompts: the files, from input to output.

  questions.py   a file of questions or prompts -> `Question`s; subsets of them
  systems.py     calls such as "ngram(max_ngram=2)" -> `System`s that decode
  reference.py   transformers and llama.cpp in other processes, as systems
  measure.py     a group of questions -> one record: every system in turn
  costs.py       a group of middling length -> seconds of rounds and passes
  running.py     groups -> all records and costs, as far as they are missing
  margins.py     where greedy completions part -> how near the two logits were
  summary.py     records -> rows of numbers, by category, by task and over all
  page.py        those rows -> a page and its figure
  explain.py, explain_page.py   rows and costs -> does it pay, and why; a page
  result.py      those rows and all that they were made of -> E.json
  compare.py     two results -> paired differences

A *group* is what is measured at once: at most `batch_size` questions of one
category, at one temperature, all their turns, by all systems in random order.
Its *record* is JSON, has all that the summary needs, and is one line of the
journal: a run that is stopped goes on with the group that it was in.
"""

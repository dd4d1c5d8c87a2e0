# The same with equipoise: a command, beside the declared columns of people.schema.toml.
equipoise train --data people.csv --test held_out.csv --model logistic --epsilon 1 --delta 1e-6 --run-dir run

"""What the configs build, in the order in which a run meets it.

A command line becomes a config, and is refused if it cannot be run:
  `command_line`, `resolvers`, `nearest`; `before_run` with `checks`: `check_targets`, `check_values`, `check_together`;
  `sweeps`, `stores`, `places`, `launching`.

Data comes from somewhere, is converted once (`converted_set`), and then streamed (`task.TaskData`):
  photos       `flowers`: `photos` (`drawing`, `archive`, `download`), `photo_conversion` or `spark_photos`
  image sets   `image_sets`: `cifar`, `imagenet`, `image_folders`; `images` makes pixels of them
  sounds       `sounds`: `chords`, and the encoding `wav`
  text         `text`, `mixture`: `documents` (`stories`), `tokens`, `text_conversion`
  captions     `captions`: `shapes`
  tables       `table`
Those with classes share `labelled_set` and `labelled_data`.

A model learns from it (`task.TaskModel`):
  `image_classifier` (`weights`), `sound_classifier`, `language_model` (`gpt`), `text_to_image`, `regressor`.

A trainer runs both, `training` says which:
  Lightning with `callbacks`; `composer_run` with `composer_model`; `torch_run` with `torch_processes` and `steps_log`.

The run ends with figures and a picture:
  `summary`, `loop_summary`, `evaluation`, `picture`; `loss_curve` and `loss_curve_plot` compare runs.

A recipe of your own is a function that gives a `TaskData`, a `TaskModel`, and a config for each that names it under
``_target_``. `table` with `regressor` is the shortest to begin from.
"""

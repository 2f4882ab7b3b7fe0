"""LightningModules without a Trainer: ``training_step``, ``configure_optimizers``, ``validation_step``.

::

    import paceline.adapters.lightning

    module = LitClassifier()
    session = paceline.start(**paceline.adapters.lightning.arguments(module), data=train_set, batch=64)
    for batch in session.batches(epochs=3):
        report = session.step(batch)                # values of self.log are in report.metrics
    session.evaluate(validation_set, paceline.adapters.lightning.validation("val_loss"))

Lightning is not imported. Any module with these methods works.
"""

from paceline.adapters.lightning.steps import arguments, training, validation

__all__ = ["arguments", "training", "validation"]

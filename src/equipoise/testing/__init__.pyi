from equipoise.testing.checks import check_method as check_method
from equipoise.testing.designs import Design as Design
from equipoise.testing.method_audit import Audit as Audit
from equipoise.testing.method_audit import audit_method as audit_method

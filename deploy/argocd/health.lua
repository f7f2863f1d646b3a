-- Health of a Relay, Destination or Source for Argo CD. It goes into the ConfigMap argocd-cm, once per kind:
--   resource.customizations.health.queuebox.io_Relay: |
--   resource.customizations.health.queuebox.io_Destination: |
--   resource.customizations.health.queuebox.io_Source: |
-- Delivery is no part of it: a receiver that is down must not turn a deployment red. The alerts watch that.
local metadata = obj.metadata or {}
local status = obj.status or {}

if (metadata.annotations or {})["queuebox.io/reconcile"] == "false" then
  return { status = "Suspended", message = "The annotation queuebox.io/reconcile is \"false\"" }
end
if status.observedGeneration ~= metadata.generation then
  return { status = "Progressing", message = "The operator has not seen this generation yet" }
end

local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end

local function is(kind, value)
  return found[kind] ~= nil and found[kind].status == value
end

if is("Stalled", "True") then
  return { status = "Degraded", message = found.Stalled.message }
end
if is("Paused", "True") then
  return { status = "Suspended", message = found.Paused.message }
end
if is("Ready", "True") then
  return { status = "Healthy", message = found.Ready.message }
end
if found.Ready ~= nil then
  return { status = "Progressing", message = found.Ready.message }
end
return { status = "Progressing", message = "Waiting for the operator" }
